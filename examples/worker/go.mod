module github.com/penstock/penstock/examples/worker

go 1.26.0

require (
	github.com/esimov/pigo v1.4.6
	github.com/pemistahl/lingua-go v1.4.0
	golang.org/x/image v0.47.0
	pgregory.net/rapid v1.3.0
)

require (
	github.com/shopspring/decimal v1.3.1 // indirect
	golang.org/x/exp v0.0.0-20221106115401-f9659909a136 // indirect
	google.golang.org/protobuf v1.36.11 // indirect
)
