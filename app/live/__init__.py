"""What is told at once: live readers, relayed messages, notices between processes."""
