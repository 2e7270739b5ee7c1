"""Files in, files out: Hugging Face checkpoints <-> ours, and the loader that opens either."""
