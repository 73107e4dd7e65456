"""The controller's decisions, pure: (state, event) to (state, commands).

Begin with ``decide``, which lists the rules in their order; ``rule`` says what a rule answers.

Nouns       ``state``, ``nodes``, ``standing``, ``phases``, ``events``, ``commands``, ``proposal``,
            ``options``
Learning    ``learn`` folds an event into the state; ``node_lifecycle`` decides that a node is lost
Rules       ``probing``, ``operator_orders``, ``checkpoint_rules``, ``planner_answer``,
            ``straggler_rules``, ``phase_rules``, ``job_rules``; ``transitions`` is what they share
Questions   ``queries``, ``replan_triggers``, ``restore_choice``, ``restore_point``, ``timeouts``,
            ``snapshot_intervals``, ``straggler_detection``, ``straggler_queries``, ``job_cost``,
            ``job_queue``, ``generation_record``
For others  ``order_validation``, ``drain_status``, ``report_reply``, ``reconfiguration_timing``
Checked     ``invariants``, after every decision
"""
