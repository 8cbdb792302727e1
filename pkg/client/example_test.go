package client_test

import (
	"context"
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"

	"github.com/penstock/penstock/pkg/client"
)

func Example() {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { // a leader
		w.WriteHeader(http.StatusCreated)
		fmt.Fprint(w, `{"id": 7, "verdict": "inserted"}`)
	}))
	defer server.Close()

	api := client.New(client.Config{URL: server.URL, Token: "pst_..."})
	pushed, err := api.Push(context.Background(), "greeting", client.Push{Payload: map[string]string{"name": "Dan"}})
	if err != nil {
		log.Fatal(err) // after five tries; the entry may have been accepted
	}
	fmt.Println(pushed.ID, pushed.Verdict)
	// Output: 7 inserted
}
