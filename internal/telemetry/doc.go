// Package telemetry has the catalog of every metric and the export of traces. Only programs import
// it; duties keep their own counters and take a tracer of OpenTelemetry's API.
package telemetry
