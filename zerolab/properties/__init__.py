"""What an engine must be: values, bytes, traffic, order, life, misuse. Each property once, for any engine class."""
