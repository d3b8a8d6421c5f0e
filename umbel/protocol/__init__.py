"""The parts that server and client share: messages, records, settings, errors, plug-ins. It imports neither side."""
