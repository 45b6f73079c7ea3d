"""What is left to read when a job hangs or has failed, and how processes come to their end."""
