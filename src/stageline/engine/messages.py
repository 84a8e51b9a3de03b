from stageline.request import EngineRequest as EngineRequest, RequestUpdate as RequestUpdate
