"""What happens between sampling and learning: rewards, buffers, schedules."""
