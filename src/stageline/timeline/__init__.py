"""What happened, where and when: one record type for real and simulated runs, and everything computed from it."""
