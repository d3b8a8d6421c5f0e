"""A site's books as its people read them: requests, their cost for each client, what remains, and decisions."""
