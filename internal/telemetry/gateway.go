package telemetry

func online(name, kind, help string, labels ...string) Metric {
	return Metric{Gateway, "gateway_" + name, kind, help, labels}
}

// gatewayCatalog lists the metrics of gateways. Flows are never labels: they are the callers' choice.
var gatewayCatalog = []Metric{
	online("queue_length", gauge, "requests that wait", "model", "criticality"),
	online("queue_latency_seconds", histogram,
		"time that requests waited; success is whether they were served", "model", "criticality", "success"),
	online("request_seconds", histogram, "time from the head of a request to the end of its answer", "model"),
	online("own_seconds", histogram, "time in the gateway itself, without waiting and the exchange with the worker"),
	online("requests_total", counter, "requests answered, by status; 499 are clients that went away",
		"model", "status"),
	online("worker_faults_total", counter, "requests whose last attempt failed by its worker; kind is unreachable (no "+
		"head of an answer), silence (none in time, or no more of it), status (5xx, or a refusal of the gateway "+
		"itself) or cut (the answer broke off; its status is counted as the client got it)", "model", "kind"),
	online("api_requests_total", counter, "requests for files, batches and predictions answered, by status; 499 are "+
		"clients that went away", "route", "status"),
	online("stock_level", gauge, "calls in flight", "model"),
	online("ceiling", gauge, "calls that may be in flight: slots held, no more than the adaptive limits", "model"),
	online("mode", gauge, "1 for the mode of the pool: pass, queue, cold", "model", "mode"),
	online("bypass_total", counter, "requests that passed the queue by", "model", "criticality"),
	online("queued_total", counter, "requests that were enqueued", "model", "criticality"),
	online("dispatched_total", counter, "requests that got a slot", "model", "criticality"),
	online("requests_expired_total", counter, "requests whose wait or deadline was over", "model"),
	online("requests_cancelled_total", counter, "waiting requests whose client went away", "model"),
	online("requests_evicted_total", counter, "waiting requests that made room for others", "model", "criticality"),
	online("queue_push_errors_total", counter, "requests that could not wait, by reason", "model", "error_type"),
	online("upper_bound", gauge, "calls in flight and waiting requests above which the mode is queue", "model"),
	online("lower_bound", gauge, "calls in flight and waiting requests below which the mode is pass", "model"),
	online("active_flows", gauge, "flows with waiting requests", "model"),
	online("bytes_waiting", gauge, "bytes of requests that wait", "model"),
	online("slots", gauge, "slots held, by state: busy, idle", "model", "state"),
	online("leases_total", counter, "statements that leased slots"),
	online("slots_granted_total", counter, "slots leased or handed over to this gateway"),
	online("slots_returned_total", counter, "slots given back"),
	online("slots_lost_total", counter, "slots that were found to be another node's"),
	online("preemptions_total", counter, "runs of durable entries that were ended for online requests"),
	online("degraded", gauge, "1 while the database does not answer: online traffic goes on with the slots held"),
	online("database_silent_seconds", gauge, "since the database answered last"),
}
