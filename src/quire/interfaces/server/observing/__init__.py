"""What can be seen from outside: health, metrics, the page's figures, traces."""
