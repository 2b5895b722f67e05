"""What happens before bytes move: store, addresses, identities, exchange of values, liveness."""
