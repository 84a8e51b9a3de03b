"""What work will cost in seconds: predicted, where `timeline` has measured. Knows nothing of requests or sockets."""
