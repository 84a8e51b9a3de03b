"""The spine: what is cut (partition, topology), what flows (microbatch), how much may be out (in_flight)."""
