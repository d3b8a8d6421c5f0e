"""What a curious server can read from releases: attacks, for audits. Nothing in the app imports them."""
