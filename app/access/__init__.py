"""Who calls, with which grants, and how often: tokens, callers, rates, proxies."""
