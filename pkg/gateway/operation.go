package gateway

import (
	"strings"

	"github.com/penstock/penstock/pkg/worker"
)

// operation is what is known of one path of the OpenAI API.
type operation struct {
	path  string // below /v1/
	form  bool   // the body is a form, else JSON
	usage bool   // its streams take stream_options, and tell their token counts where that is asked for

	// A run may go on when its connection closes: servers compute images and audio on threads that do not see the
	// connection. The engines behind the other paths end a run with its connection.
	lasts bool

	// worker is the operation of the worker that an entry made of such a request stands for; empty: such requests
	// cannot become entries.
	worker string
}

// operations are all that is passed on of the OpenAI API.
var operations = []operation{
	{path: "chat/completions", usage: true, worker: worker.OperationChat},
	{path: "completions", usage: true, worker: worker.OperationCompletions},
	{path: "responses", worker: worker.OperationResponses},
	{path: "messages"}, // of Anthropic's API; a stream that breaks off has an event of its own, see messagesPath
	{path: "embeddings", worker: worker.OperationEmbeddings},
	{path: "rerank", worker: worker.OperationRerank},
	{path: "score", worker: worker.OperationScore},
	{path: "pooling", worker: worker.OperationPooling},
	{path: "classify", worker: worker.OperationClassify},
	{path: "images/generations", lasts: true, worker: worker.OperationImages},
	{path: "images/edits", form: true, lasts: true},
	{path: "audio/speech", lasts: true},
	{path: "audio/transcriptions", form: true, lasts: true},
	{path: "audio/translations", form: true, lasts: true},
}

// operationOf returns what is known of a path; the zero value where it is none of the OpenAI API.
func operationOf(path string) operation {
	if below, is := strings.CutPrefix(path, "/v1/"); is {
		for _, o := range operations {
			if o.path == below {
				return o
			}
		}
	}
	return operation{}
}

// Operation returns the operation of the worker for a path of the OpenAI API. ok is false where
// requests cannot become entries.
func Operation(path string) (operation string, ok bool) {
	of := operationOf(path).worker
	return of, of != ""
}
