"""Models: the decoder families, heads, small networks, and Hugging Face folders in and out."""
