"""Messages by receiver: one module for each actor."""
