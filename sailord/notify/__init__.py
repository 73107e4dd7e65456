"""Events for those who follow: feed, outbox, outgoing webhooks."""
