"""What server and clients agree on: messages, records, errors, plugins. Knows of neither side."""
