"""The hospital experiment as a Flower App written the usual way: a SuperNode a client, a message a client."""
