"""The client of the hub: logins, push, pull and the metrics sink. It depends on nothing but `shoestring` itself."""
