"""The 3D-HybridEngine: from the layout that trains to the one that generates, and back (HybridFlow, section 5)."""
