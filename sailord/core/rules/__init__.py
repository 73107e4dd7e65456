"""The rules of a decision, which ``decide`` lists in their order."""
