"""What a trained model is used for: losses over documents, and text."""
