package worker

import "net/http"

// ClassifyAnswer turns an answer that is not a success into an outcome, for callers that exchange bytes
// with a worker themselves. request is the body that the worker was sent: phrases that its answer
// echoes of it are no evidence.
func ClassifyAnswer(status int, header http.Header, body, request []byte) Outcome {
	return classifyStatus(status, header, body, request)
}

// ClassifyFirstEvent classifies the data of the first event of a stream, where that is an error: servers
// that stream promise success before they know whether they have room. ok is false for any other event.
func ClassifyFirstEvent(data, request []byte) (o Outcome, ok bool) {
	if !hasMember(data, "error") || hasMember(data, "choices") {
		return Outcome{}, false
	}
	return errorAfterOK(data, request, false), true
}

// ResolveHeaders reads the headers of a model with their secrets in place: env:NAME and file:/path as
// whole values, ${env:NAME} within.
func ResolveHeaders(headers map[string]string) (http.Header, error) {
	return resolveHeaders(headers, ReadSecret)
}
