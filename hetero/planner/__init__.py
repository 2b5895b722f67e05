"""From a cluster and a model to the plan that trains it fastest: profiles, costs, a simulator."""
