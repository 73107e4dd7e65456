"""What the API answers: the types, and how they are made from the state."""
