"""The papers' tables and figures, made by the app's own strategy, ClientApp and gate."""
