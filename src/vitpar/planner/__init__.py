"""The planner: profiles of hardware and models, prices of plans, and the search for the best plan."""
