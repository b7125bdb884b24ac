"""From a call to the launches that compute it."""
