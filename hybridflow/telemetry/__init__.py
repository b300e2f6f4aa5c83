"""What a run tells: metrics, samples, timeline, console and report."""
