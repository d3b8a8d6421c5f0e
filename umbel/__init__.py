"""umbel: what people type and import. Personalised and private federated learning, as a Flower App."""
