// Package keda is an external scaler of KEDA: it answers KEDA's questions by gRPC with the numbers that
// penstock.deployment_state has, so that KEDA sets what Penstock decided.
//
// An unknown number is an error and never a zero: KEDA and the HorizontalPodAutoscaler that it made leave the
// number as it is then. externalscaler is generated from KEDA's description of the service, by protoc-gen-go
// and protoc-gen-go-grpc.
package keda
