"""What a verifier source runs in its worker process. Each file stands alone: it imports nothing of the project."""
