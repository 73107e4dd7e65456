"""The controller's decisions, pure: (state, event) to (state, commands).

``decide``              applies ``learn`` and then the rules, which it lists in their order
``learn``               folds an event into the state
``node_lifecycle``      decides that a node is lost
``order_validation``    rejects orders that would have no effect
``invariants``          are checked after every decision
``model``               nouns: the state and its parts, events, commands, what a rule answers
``queries``             questions about the state
``rules``               what is done about it
"""
