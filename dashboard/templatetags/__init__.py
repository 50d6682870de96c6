"""What templates need to present values."""
