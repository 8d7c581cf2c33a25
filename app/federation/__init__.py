"""Federation: keeps this store equal to its peers."""
