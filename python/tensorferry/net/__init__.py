"""Network settings, servers and the log lines of a receive. No module in this package imports torch."""
