// Package telemetry is what the programs tell the outside about themselves: the catalog of every metric, and the
// export of traces. Only programs import it; duties count for themselves and take a tracer of OpenTelemetry's API.
package telemetry
