"""An ordinary Flower app that learns two models from noisy updates."""
