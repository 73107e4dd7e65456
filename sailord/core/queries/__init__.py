"""Questions about the state, asked by rules, the controller and the API; none changes anything."""
