"""What a snapshot says about its channels: tables, pictures, one page."""
