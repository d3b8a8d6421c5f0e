"""What a curious or malicious server reads from releases: attacks, audits, the leak meter. Nothing below knows them."""
