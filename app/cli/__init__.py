"""The command line: `sdstore`."""
