"""Code generated from proto/ by protoc; never edited by hand (`make proto`)."""
