"""The client of the hub: logins, push, pull and the sink of metrics. It needs nothing but `shoestring` itself."""
