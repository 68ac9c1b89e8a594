"""From profiles to plans: what a plan will cost before it runs."""
