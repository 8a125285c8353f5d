"""The one decode loop, and the door through which text enters and leaves."""
