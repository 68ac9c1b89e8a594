"""What ends every rank when one fails, and names the exchange that is stuck."""
