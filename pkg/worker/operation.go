package worker

// OperationPath returns the path of an operation at OpenAI-compatible servers, below the root of their API without /v1;
// empty: there is no such operation.
func OperationPath(operation string) string { return operationPaths[operation] }
