package gateway

import (
	"bytes"
	"encoding/json"
	"strings"

	"github.com/penstock/penstock/pkg/worker"
)

// durableOperations are the paths below /v1 whose requests can become entries, and the operation of the worker that
// each stands for.
var durableOperations = map[string]string{
	"chat/completions":   worker.OperationChat,
	"completions":        worker.OperationCompletions,
	"embeddings":         worker.OperationEmbeddings,
	"responses":          worker.OperationResponses,
	"rerank":             worker.OperationRerank,
	"score":              worker.OperationScore,
	"pooling":            worker.OperationPooling,
	"classify":           worker.OperationClassify,
	"images/generations": worker.OperationImages,
}

// Operation returns the operation of the worker for a path of the OpenAI API. ok is false where
// requests cannot become entries.
func Operation(path string) (operation string, ok bool) {
	below, is := strings.CutPrefix(path, "/v1/")
	operation, ok = durableOperations[below]
	return operation, is && ok
}

// DurablePayload returns the body of a request as the payload of an entry: with the operation that its worker is
// asked for, which the worker does not get to see. The body must be a JSON object. A member operation of its own
// is the first of two, and without effect.
func DurablePayload(body json.RawMessage, operation string) json.RawMessage {
	text := bytes.TrimRight(body, " \t\r\n")
	inner := bytes.TrimRight(text[:len(text)-1], " \t\r\n")
	payload := make([]byte, 0, len(inner)+len(operation)+20)
	payload = append(payload, inner...)
	if inner[len(inner)-1] != '{' {
		payload = append(payload, ',')
	}
	payload = append(payload, `"operation":"`...)
	payload = append(payload, operation...)
	return append(payload, `"}`...)
}
